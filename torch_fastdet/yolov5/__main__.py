from torch_fastdet.yolov5.launcher import main

main()
